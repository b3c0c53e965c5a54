"""Collectives of the host: none of its own yet; one rank uses the contract's SoloCommunicator."""
