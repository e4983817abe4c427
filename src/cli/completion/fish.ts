import { allCommands, type CommandWords, type FlagWords, type Values } from './words.ts';

/** A completion script for fish 3 and later. */
export function fishCompletion(words: CommandWords): string {
  const commands = allCommands(words);
  const steps = commands.filter(({ path }) => path.length > 0).map(({ path }) => quote(path.join(' ')));
  return `# fish completion of baton, made by: baton completion fish
function __baton_at
    set -l at ''
    set -l words (commandline -opc)
    for word in $words[2..-1]
        set -l next (string trim -- "$at $word")
        if contains -- $next ${steps.join(' ')}
            set at $next
        end
    end
    test "$at" = "$argv[1]"
end
complete -c baton -f
${commands.flatMap(commandLines).join('\n')}
`;
}

function quote(text: string): string {
  return `'${text.replaceAll('\\', '\\\\').replaceAll("'", "\\'")}'`;
}

function commandLines({ path, commands, flags, values }: CommandWords): readonly string[] {
  const here = `complete -c baton -n ${quote(`__baton_at ${quote(path.join(' '))}`)}`;
  return [
    ...commands.map(({ path: words, about }) => `${here} -a ${quote(words.at(-1) ?? '')} -d ${quote(about)}`),
    ...flags.map((flag) => `${here} ${flagWords(flag)} -d ${quote(flag.about)}`),
    ...(values === 'none' ? [] : [`${here} ${valueWords(values)}`]),
  ];
}

function flagWords({ names, values }: FlagWords): string {
  const words = names.map((name) => (name.startsWith('--') ? `-l ${name.slice(2)}` : `-s ${name.slice(1)}`));
  if (values !== undefined) words.push(values === 'file' ? '-r -F' : '-x');
  if (Array.isArray(values)) words.push(valueWords(values));
  return words.join(' ');
}

function valueWords(values: Exclude<Values, 'none'>): string {
  return values === 'file' ? '-F' : `-a ${quote(values.join(' '))}`;
}
