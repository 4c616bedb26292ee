"""The server's HTTP endpoints: of episodes, of the engine, and of an operator."""
