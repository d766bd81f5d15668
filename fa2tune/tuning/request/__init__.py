"""What is asked for: a request, checked; its plan; the tuning jobs that it comes to."""
