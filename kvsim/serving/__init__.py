"""Requests that arrive one by one: continuous batching on predicted step times."""
