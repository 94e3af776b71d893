OUT=checkpoints/tiny
TOKENS_VOCAB=data/gpt2-vocab.json
TOKENS_MERGE=data/gpt2-merges.txt
#CORPUS=data/other_text_document
CORPUS=data/corpus_text_document

GPUS=2
MICRO=1
GLOBAL=16
TP=2
PP=1

LAYERS=2
HIDDEN=64
HEADS=2
SEQ=1024

SAVE_EVERY=50

MODEL_ARGS=" \
    --num-layers $LAYERS \
    --hidden-size $HIDDEN \
    --num-attention-heads $HEADS \
    --seq-length $SEQ \
    --max-position-embeddings $SEQ \
    --micro-batch-size $MICRO \
    --rampup-batch-size 2 2 1_000 \
    --global-batch-size $GLOBAL \
    --train-samples 100 \
    --optimizer adam \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --adam-eps 1e-8 \
    --lr 1e-4 \
    --lr-warmup-samples 5 \
    --clip-grad 1.0 \
    --weight-decay 1e-1 \
    --fp16 \
    --partition-activations \
    --seed 42 \
    --vocab-file $TOKENS_VOCAB \
    --merge-file $TOKENS_MERGE \
    "

OUTPUT_ARGS=" \
    --exit-interval 200 \
    --log-interval 10 \
    --save-interval $SAVE_EVERY \
    --eval-interval 100 \
    --eval-iters 10 \
    --checkpoint-activations \
    "

DATA_ARGS=" \
    --save $OUT \
    --load $OUT \
    --data-path $CORPUS \
    --tensorboard-dir output/tensorboard \
    --tensorboard-queue-size 5 \
    --log-timers-to-tensorboard \
    --log-batch-size-to-tensorboard \
    --log-validation-ppl-to-tensorboard \
    "

STAGE=1
config_json="./ds_config.json"

# the engine works the accumulation out itself
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": $MICRO,
  "train_batch_size": $GLOBAL,
  "gradient_clipping": 1.0,
  "zero_optimization": {
    "stage": $STAGE
  },
  "fp16": {
    "enabled": true,
    "loss_scale": 0,
    "loss_scale_window": 500,
    "hysteresis": 2,
    "min_loss_scale": 1,
    "initial_scale_power": 12
  },
  "steps_per_print": 2000,
  "wall_clock_breakdown": false
}
EOT

ENGINE_ARGS=" \
    --deepspeed \
    --deepspeed_config ${config_json} \
    --zero-stage ${STAGE} \
    --deepspeed-activation-checkpointing \
    "

ALL_ARGS="$MODEL_ARGS $OUTPUT_ARGS $DATA_ARGS $ENGINE_ARGS"

export LOGLEVEL=WARNING
PYTHONPATH=/src/Megatron-DeepSpeed
MASTER_PORT=6777

export LAUNCHER="deepspeed --num_gpus $GPUS --master_port $MASTER_PORT"

# export LAUNCHER="python -u -m torch.distributed.run \
#     --nproc_per_node $GPUS \
#     "

export CMD=" \
    env PYTHONPATH=$PYTHONPATH USE_TF=0 \
    $LAUNCHER pretrain_gpt.py \
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size $PP \
    --distributed-backend nccl \
    $ALL_ARGS \
    "

echo $CMD

$CMD
