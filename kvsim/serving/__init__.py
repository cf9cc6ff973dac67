"""Requests that arrive one by one: continuous batching on predicted step times.

May import prediction and everything below.
"""
