#!/bin/sh
# dockerd's runtime where the machine itself lacks CAP_SYS_RESOURCE: take it out of what --privileged asks for
# (asking for less, never for more), then call runc. @RUNC@ is filled in when the engine is started.
file= previous=
for word; do
  case $previous in
    --bundle | -b) file=$word/config.json ;;
    --process | -p) file=$word ;;
  esac
  previous=$word
done
[ ! -f "$file" ] || sed -i 's/,"CAP_SYS_RESOURCE"//g; s/"CAP_SYS_RESOURCE",//g' "$file"
exec @RUNC@ "$@"
