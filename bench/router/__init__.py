"""What the router costs per request and per token, in front of workers that compute nothing."""
