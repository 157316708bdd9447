#!/bin/sh
# Runs a command while a store is served in a temporary folder: with_store.sh PROGRAM COMMAND..., where PROGRAM is `wholemem`.
program=$1
shift
folder=$(mktemp -d) || exit 1
export WHOLEMEM_SOCKET="$folder/socket"
"$program" serve --size 64MiB >"$folder/log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null; wait "$server"; rm -r "$folder"' EXIT
tries=0
until "$program" ls >/dev/null 2>&1; do
    tries=$((tries + 1))
    if [ "$tries" -gt 300 ] || ! kill -0 "$server" 2>/dev/null; then
        cat "$folder/log" >&2
        exit 1
    fi
    sleep 0.1
done
"$@"
