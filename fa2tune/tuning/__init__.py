"""Tuning, in four floors, lowest first: request, search, select, run. A floor imports from itself and from those below."""
