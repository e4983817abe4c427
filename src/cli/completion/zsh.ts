import { allCommands, type CommandWords, type Values } from './words.ts';

/** A completion function for zsh; to be read by `source`, or kept as `_baton` in a folder of `$fpath`. */
export function zshCompletion(words: CommandWords): string {
  const commands = allCommands(words);
  const steps = commands.filter(({ path }) => path.length > 0).map(({ path }) => quote(path.join(' ')));
  return `#compdef baton
# zsh completion of baton, made by: baton completion zsh
_baton() {
  local at='' next i
  local -a flags names
  for ((i = 2; i < CURRENT; i++)); do
    next="\${at:+$at }\${words[i]}"
    case $next in
      (${steps.join('|')}) at=$next ;;
    esac
  done
  case "$at \${words[CURRENT-1]}" in
${commands.flatMap(valueCases).join('\n')}
  esac
  case $at in
${commands.map(commandCase).join('\n')}
  esac
  if [[ $PREFIX == -* ]]; then
    _describe -o flag flags
  elif (( \${#names} )); then
    _describe name names
  fi
}
if [[ \${funcstack[1]} == _baton ]]; then
  _baton "$@"
else
  compdef _baton baton
fi
`;
}

function quote(text: string): string {
  return `'${text.replaceAll("'", `'\\''`)}'`;
}

/** An entry of _describe: a colon parts a word from what is said of it. */
function entry(word: string, about: string): string {
  return quote(`${word.replaceAll(':', '\\:')}:${about}`);
}

function valueCases({ path, flags }: CommandWords): readonly string[] {
  return flags.flatMap(({ names, values }) => {
    if (values === undefined) return [];
    const patterns = names.map((name) => quote(`${path.join(' ')} ${name}`)).join('|');
    return [`    (${patterns}) ${action(values)}return ;;`];
  });
}

function action(values: Values): string {
  if (values === 'none') return '';
  return values === 'file' ? '_files; ' : `compadd -- ${values.join(' ')}; `;
}

function commandCase({ path, commands, flags, values }: CommandWords): string {
  const entries = flags.flatMap(({ names, about }) => names.map((name) => entry(name, about)));
  const others = [
    ...commands.map((command) => entry(command.path.at(-1) ?? '', command.about)),
    ...(Array.isArray(values) ? values.map((value) => quote(value)) : []),
  ];
  const files = values === 'file' ? ' [[ $PREFIX == -* ]] || { _files; return; };' : '';
  return `    (${quote(path.join(' '))})${files} flags=(${entries.join(' ')}); names=(${others.join(' ')}) ;;`;
}
