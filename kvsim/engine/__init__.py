"""From ops to seconds: what an op moves and computes, the roofline, and the timeline of streams.

May import machines, models and the ground. It knows no technique.
"""
