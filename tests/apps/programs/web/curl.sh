#!/bin/sh
# Downloads and uploads with curl: a process a connection, which is kept.
what=$1 port=$2 count=$3 place=$4
[ "$what" = client ] || exit 2
here=http://127.0.0.1:$port

get_and_put() {
	while [ -e "$place/wait" ]; do
		curl -sSf -o /dev/null "$here/nudge" -o /dev/null "$here/nudge" || return
	done
	curl -sSf -o "$place/$1.out" "$here/large" \
		--next -sSf -o /dev/null -H Expect: -T "$place/$1.in" "$here/up/$1" \
		--next -sSf -o "$place/$1.back" "$here/up/$1"
}

number=0 children=
while [ "$number" -lt "$count" ]; do
	get_and_put "$number" &
	children="$children $!"
	number=$((number + 1))
done
failed=0
for child in $children; do
	wait "$child" || failed=$?
done
exit "$failed"
