"""Breaking a private installation on purpose, by a seeded plan, and proving from its history that nothing was lost."""
