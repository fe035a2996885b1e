"""Connections of the user's own, in the form in which the platform's statements want one: a module for each driver."""
