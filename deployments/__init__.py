"""What runs inside a Ray replica: the model replica, the ingress, and the model they stand on.

Reading order: wire, ingress, tokenization, model_replica, counters, model, forward, ragged_attention, self_check.
May import batching, ray, torch, transformers, sentence_transformers, tokenizers and itself. Modules that the
ingress uses import no torch, so that its process stays small.
"""
