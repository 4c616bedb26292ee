"""Hands out episodes, stores them, and delivers their outcomes to the trainer."""
