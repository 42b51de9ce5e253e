#!/bin/bash
env | grep SIDESTEP_TRAVEL || echo "no travel var"
exec $ROOT/trials/t reader $2
