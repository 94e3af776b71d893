"""DeepSpeed's pipeline engine, as Megatron-DeepSpeed and GPT-NeoX use it."""
