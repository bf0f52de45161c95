"""The reference model: a small MLA model trained from text this package generates.

Life of the model, in order:

1. ``facts``, ``tasks``, ``stories``, ``conversations`` write checkable chats from a seed;
2. ``tokenizer`` learns a byte-level BPE from them and holds the chat template;
3. ``stream`` packs tokenised chats in worker processes; ``model`` is the network that trains;
4. ``train`` runs all of it and exports a HuggingFace checkpoint; ``score`` and ``latent`` judge it.

``text`` writes documents for calibration and perplexity.
"""
