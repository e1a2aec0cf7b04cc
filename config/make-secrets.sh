#!/bin/sh
# Write into a folder what docker-compose.yml mounts as secrets; passwords that are there stay.
# Usage: make-secrets.sh FOLDER [options of `embedctl config acl`]
set -eu
umask 077
folder=$1
shift

if ! [ -s "$folder/flower-users" ]; then
    python -c 'import secrets; print(f"admin:{secrets.token_urlsafe(32)}")' > "$folder/flower-users.part"
    mv "$folder/flower-users.part" "$folder/flower-users"
fi
mkdir -p "$folder/gateway"
[ -e "$folder/gateway/keys" ] || : > "$folder/gateway/keys"
embedctl config acl --passwords "$folder" "$@" > "$folder/users.acl.part"
mv "$folder/users.acl.part" "$folder/users.acl"

# A container's user is none of this machine's, so that it is the folder that keeps others out. The password of Redis'
# user admin goes into no container.
cd "$folder"
chmod 644 users.acl producer worker monitor flower flower-users gateway/keys
chmod 755 gateway
