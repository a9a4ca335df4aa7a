"""What clients ask for: one request to the scheduler for each sequence, what it becomes, and what is told of it."""
