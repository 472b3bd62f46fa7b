"""What a person reads: progress and steps on the console, tables."""
