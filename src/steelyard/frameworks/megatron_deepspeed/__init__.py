"""BigScience's and DeepSpeed's forks of Megatron-LM."""
