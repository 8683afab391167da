"""Checks that an environment, built in or a user's own, keeps its promises."""
