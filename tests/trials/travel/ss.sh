#!/bin/bash
# ss.sh ARGS: run under sidestep at once
export SIDESTEP_SOCKET=$ROOT/trials/run/p
exec timeout ${T:-25} $ROOT/.venv/bin/sidestep run --promote-after 0 "$@"
