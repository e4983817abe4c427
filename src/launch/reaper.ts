/**
 * A shell program that outlives `baton launch`: it reads `+GROUP` and `-GROUP` lines, and when its input ends, because
 * that process has closed it or was killed, it ends the groups that are left: TERM, a grace period ($1, seconds), KILL.
 */
export const REAPER = `
trap '' INT TERM HUP
groups=' '
while read -r line; do
  group=\${line#?}
  case $line in
    +*) groups="$groups$group " ;;
    -*) case $groups in *" $group "*) groups="\${groups%% $group *} \${groups#* $group }" ;; esac ;;
  esac
done
alive() { for g in $groups; do kill -0 -"$g" 2>/dev/null && return 0; done; return 1; }
for g in $groups; do kill -TERM -"$g" 2>/dev/null; done
left=$1
while [ "$left" -gt 0 ] && alive; do sleep 1; left=$((left - 1)); done
for g in $groups; do kill -KILL -"$g" 2>/dev/null; done
:
`;
