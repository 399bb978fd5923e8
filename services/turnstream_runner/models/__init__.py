"""What a runner asks for an answer: the port, its implementations, the one retry layer and the names they go by."""
