"""The life of a request: attempts, retries, hand-over, resumption, token order, traces."""
