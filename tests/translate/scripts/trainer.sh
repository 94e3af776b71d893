#!/bin/bash
OUT=$SCRATCH/out
torchrun --nproc_per_node=8 run_clm.py \
    --config_name gpt2-tiny \
    --tokenizer_name gpt2 \
    --dataset_name wikitext \
    --do_train --do_eval \
    --block_size 512 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 2 \
    --max_steps 1000 \
    --learning_rate 3e-4 \
    --warmup_ratio 0.05 \
    --lr_scheduler_type cosine \
    --weight_decay 0.1 \
    --bf16 True \
    --gradient_checkpointing \
    --fsdp "full_shard auto_wrap" \
    --logging_steps 10 \
    --save_steps 500 \
    --output_dir $OUT
