import { allCommands, type CommandWords, type Values } from './words.ts';

/** A completion script for bash 3.2 and later. */
export function bashCompletion(words: CommandWords): string {
  const commands = allCommands(words);
  const steps = commands.filter(({ path }) => path.length > 0).map(({ path }) => `'${path.join(' ')}'`);
  return `# bash completion of baton, made by: baton completion bash
_baton() {
  local cur=\${COMP_WORDS[COMP_CWORD]} prev=\${COMP_WORDS[COMP_CWORD - 1]} at='' next i words=''
  for ((i = 1; i < COMP_CWORD; i++)); do
    next="\${at:+$at }\${COMP_WORDS[i]}"
    case $next in
      ${steps.join(' | ')}) at=$next ;;
    esac
  done
  COMPREPLY=()
  case "$at $prev" in
${commands.flatMap(valueCases).join('\n')}
  esac
  case $at in
${commands.map(commandCase).join('\n')}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -F _baton baton
`;
}

const FILE = 'compopt -o default 2>/dev/null; return';

function valueCases({ path, flags }: CommandWords): readonly string[] {
  return flags.flatMap(({ names, values }) => {
    if (values === undefined) return [];
    const patterns = names.map((name) => `'${path.join(' ')} ${name}'`).join(' | ');
    return [`    ${patterns}) ${action(values)} ;;`];
  });
}

function action(values: Values): string {
  if (values === 'none') return 'return';
  if (values === 'file') return FILE;
  return `COMPREPLY=($(compgen -W '${values.join(' ')}' -- "$cur")); return`;
}

function commandCase({ path, commands, flags, values }: CommandWords): string {
  const names = flags.flatMap((flag) => flag.names);
  const others = [...commands.map((command) => command.path.at(-1) ?? ''), ...(Array.isArray(values) ? values : [])];
  const plain = values === 'file' ? FILE : `words='${others.join(' ')}'`;
  return `    '${path.join(' ')}') if [[ $cur == -* ]]; then words='${names.join(' ')}'; else ${plain}; fi ;;`;
}
