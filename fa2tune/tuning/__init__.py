"""From a request to cache rows: plan, candidates, verdicts, winners."""
