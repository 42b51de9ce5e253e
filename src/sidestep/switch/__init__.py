"""The switch: decides which connections are offloaded. So far: offers, claims and the budget of the local channel."""
