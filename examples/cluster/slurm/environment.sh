# Sourced by every job. RUN is on a file system that all nodes share.
export CONFIG=${CONFIG:-$HOME/run.yaml} RUN=${RUN:-$HOME/runs/gsm8k} REPLICAS=4
export PORT=10086 REPLICA_PORT=8000 MODEL=Qwen/Qwen3-8B
# Secrets are files that only their owner can read: no script and no command line has them.
export TINKERSCRIPT_CLIENT_TOKEN_FILE=$RUN/secrets/client_token
export TINKERSCRIPT_ADMIN_TOKEN_FILE=$RUN/secrets/admin_token
