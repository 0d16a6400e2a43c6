"""Policy: which rows run together, and what happens to each of them. No I/O, no clock of its own.

Reading order: request, errors, limits, buckets, queue, plan, packing, padding, batcher, groups, demo.
May import the standard library, numpy and itself.
"""
