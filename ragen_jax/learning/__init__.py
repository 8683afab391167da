"""Rewards, filters, advantages, losses and the update: functions of the record."""
