"""What a model runs on: hardware, software stacks, their files, and both together as a deployment.

May import models and the ground.
"""
