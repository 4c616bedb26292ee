"""Keeps what tinker's SDK leaves behind out of other tests."""

from wire_setup import sockets_of_the_sdk as sockets_of_the_sdk
