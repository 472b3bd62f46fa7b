"""What a person reads: progress and steps on the console, tables; what the host says of this process."""
