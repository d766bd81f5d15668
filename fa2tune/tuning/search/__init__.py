"""What is tried: candidates, what proposes them, what became of each."""
