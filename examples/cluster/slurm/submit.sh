#!/bin/bash
# Submits a run: ./submit.sh. Cancel it with `scancel --name=tinkerscript`; resubmitting resumes it.
set -euo pipefail
cd "$(dirname "$0")"
source environment.sh
umask 077
mkdir -p "$RUN/secrets" "$RUN/replicas" "$RUN/slurm"
for name in client_token admin_token replica_key; do
  [ -s "$RUN/secrets/$name" ] || python3 -c 'import secrets; print(secrets.token_hex())' > "$RUN/secrets/$name"
done
rm -f "$RUN"/replicas/*.url "$RUN/server.url"
logs=(--output="$RUN/slurm/%x-%A-%a.log" --open-mode=append)
trainer=$(sbatch --parsable "${logs[@]}" trainer.sbatch)
sbatch "${logs[@]}" --dependency="after:$trainer" replicas.sbatch
sbatch "${logs[@]}" --dependency="after:$trainer" workers.sbatch
