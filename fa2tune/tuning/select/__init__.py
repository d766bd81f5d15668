"""What is kept: finalists, their races and checks, and the rows that they lead to."""
