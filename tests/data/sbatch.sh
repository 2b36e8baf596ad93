#!/bin/bash

# Parameters
#SBATCH --account='a b'
#SBATCH --comment='it'"'"'s "this" $HOME #1'
#SBATCH --constraint='h100&nvlink'
#SBATCH --cpus-per-task=12
#SBATCH --dependency=afterok:17
#SBATCH --exclude='node[3,7]'
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name='it'"'"'s a-20260101-000000-abcdef'
#SBATCH --mail-type=END
#SBATCH --mail-user=a@b
#SBATCH --mem=900G
#SBATCH --nodelist='node[1-2]'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output='/runs/it'"'"'s a-20260101-000000-abcdef/logs/job-%j.log'
#SBATCH --partition=h100
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --reservation=r1
#SBATCH --signal=USR2@90
#SBATCH --switches=1@2:00:00
#SBATCH --time=1-02:30:00

# setup
PREFIX_TRAIN_RUN='/runs/it'"'"'s a-20260101-000000-abcdef' PREFIX_TRAIN_PYTHON=PYTHON
export PYTHONSAFEPATH=1
stop() { PYTHONPATH="$PREFIX_TRAIN_RUN/code" "$PREFIX_TRAIN_PYTHON" -m slurm.finish "$PREFIX_TRAIN_RUN" "$1:$2"; exit $?; }
module load cuda
rc=$?; [ $rc -eq 0 ] || stop 'setup line 1' $rc
export X=${HOME}
rc=$?; [ $rc -eq 0 ] || stop 'setup line 2' $rc
export PYTHONPATH="$PREFIX_TRAIN_RUN/code${PYTHONPATH:+:$PYTHONPATH}"
PREFIX_TRAIN_ATTEMPT=$("$PREFIX_TRAIN_PYTHON" -m slurm.life "$PREFIX_TRAIN_RUN") || exit $?
export PREFIX_TRAIN_ATTEMPT
"$PREFIX_TRAIN_PYTHON" -m prefix_train.cli plan "$PREFIX_TRAIN_RUN" || stop plan $?
timeout --kill-after=10 480 srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=12 '--container-image=/images/a b.sqsh' '--container-mounts=/scratch:/scratch,/a b:/b' "$PREFIX_TRAIN_PYTHON" -m preflight run "$PREFIX_TRAIN_RUN"; [ $? -ge 124 ] || (for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do [ -e "$PREFIX_TRAIN_RUN/preflight/$PREFIX_TRAIN_ATTEMPT/$node.json" ] || timeout --kill-after=10 480 srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task=12 '--container-image=/images/a b.sqsh' '--container-mounts=/scratch:/scratch,/a b:/b' --nodelist="$node" "$PREFIX_TRAIN_PYTHON" -m preflight run "$PREFIX_TRAIN_RUN" & done; wait)
"$PREFIX_TRAIN_PYTHON" -m preflight judge "$PREFIX_TRAIN_RUN" --quiet --nodes "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)" || { "$PREFIX_TRAIN_PYTHON" -m slurm.finish "$PREFIX_TRAIN_RUN" gate:1; exit 78; }
timeout --kill-after=10 180 srun --nodes=2 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=12 '--container-image=/images/a b.sqsh' '--container-mounts=/scratch:/scratch,/a b:/b' "$PREFIX_TRAIN_PYTHON" -m preflight collectives "$PREFIX_TRAIN_RUN"
"$PREFIX_TRAIN_PYTHON" -m preflight judge "$PREFIX_TRAIN_RUN" --ranks 16 --nodes "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)" || { "$PREFIX_TRAIN_PYTHON" -m slurm.finish "$PREFIX_TRAIN_RUN" gate:1; exit 78; }
srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --overlap --mem=0 '--output=/runs/it'"'"'s a-20260101-000000-abcdef/logs/watch-%j-%n.log' --cpus-per-task=12 '--container-image=/images/a b.sqsh' '--container-mounts=/scratch:/scratch,/a b:/b' "$PREFIX_TRAIN_PYTHON" -m slurm.watch "$PREFIX_TRAIN_RUN" >>"$PREFIX_TRAIN_RUN/logs/watch-$SLURM_JOB_ID.log" 2>&1 &
"$PREFIX_TRAIN_PYTHON" -m slurm.presence "$PREFIX_TRAIN_RUN"

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output '/runs/it'"'"'s a-20260101-000000-abcdef/submitit/%j_%t_log.out' --kill-on-bad-exit=1 --cpus-per-task=12 '--container-image=/images/a b.sqsh' '--container-mounts=/scratch:/scratch,/a b:/b' PYTHON -u -m submitit.core._submit '/runs/it'"'"'s a-20260101-000000-abcdef/submitit'


# teardown
rc=$?
[ -d "$PREFIX_TRAIN_RUN" ] || { echo "failed: the run folder $PREFIX_TRAIN_RUN is gone" >&2; exit 1; }
"$PREFIX_TRAIN_PYTHON" -m slurm.finish "$PREFIX_TRAIN_RUN" $rc
exit $?
