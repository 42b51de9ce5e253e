"""Tools on the verbs: a server, and who measures against it. They know `verbs`, `cm` and `work`, and no device."""
