#! /bin/bash
# A small GPT, its layout and batch from the command line.
PER_NODE=${1:-8}
MASTER_ADDR=localhost
MASTER_PORT=60011
NNODES=1
NODE_RANK=0
WORLD_SIZE=$(($PER_NODE*$NNODES))

DATA=/data/gpt/corpus_text_document
VOCAB=/data/gpt/vocab.json
MERGES=/data/gpt/merges.txt

LAUNCH_ARGS="--nproc_per_node $PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"

TP=${2:-1}
PP=${3:-1}
DP=$(($WORLD_SIZE/$TP/$PP))

MICRO=${4:-8}
GLOBAL=${5:-64}

ITERS=${6:-100}

CHECKPOINTS=checkpoints/gpt_gpus${PER_NODE}_dp${DP}_tp${TP}_pp${PP}_mbs${MICRO}_gbs${GLOBAL}
LOG=./log/gpt_dp${DP}_tp${TP}_pp${PP}.log

python -m torch.distributed.launch $LAUNCH_ARGS \
       pretrain_gpt.py \
       --tensor-model-parallel-size $TP \
       --pipeline-model-parallel-size $PP \
       --num-layers 24 \
       --hidden-size 1024 \
       --num-attention-heads 16 \
       --micro-batch-size $MICRO \
       --global-batch-size $GLOBAL \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --train-iters $ITERS \
       --lr-decay-iters 320000 \
       --save $CHECKPOINTS \
       --load $CHECKPOINTS \
       --data-path $DATA \
       --vocab-file $VOCAB \
       --merge-file $MERGES \
       --data-impl mmap \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 0.00015 \
       --lr-decay-style cosine \
       --min-lr 1.0e-5 \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --lr-warmup-fraction .01 \
       --checkpoint-activations \
       --log-interval 1 \
       --save-interval 1000 \
       --eval-interval 100 \
       --eval-iters 10 \
       --fp16 2>&1 | tee ${LOG}

echo "log in ${LOG}"
