import type { Command, CommanderError } from 'commander';
import { FLAGS } from '../config/flags.ts';
import { didYouMean } from '../config/suggest.ts';
import { fileKeyHint } from './file-key-hint.ts';

/** A mistake in the command line as one sentence that says what to write; `takesFlags`: the command is one that serves. */
export function usageSentence(
  program: Command,
  error: CommanderError,
  args: readonly string[],
  takesFlags: (command: string) => boolean,
): string {
  const [first = ''] = args;
  const word = /^error: unknown (?:option|command) '([^'=]*)/.exec(error.message)?.[1] ?? '';
  const { command, path } = commandOf(program, args);
  if (error.code === 'commander.unknownOption') {
    if (command === program && FLAGS.some(({ name }) => word === `--${name}`)) {
      return `${word} needs a command before it: baton serve ${word} ...`;
    }
    const hint = takesFlags(first) ? fileKeyHint(word) : undefined;
    const flags = command.options.flatMap(({ long }) => long ?? []);
    return `unknown option '${word}'${hint === undefined ? near(word, flags, path) : `; ${hint}`}`;
  }
  const names = command.commands.map((each) => each.name());
  if (error.code === 'commander.unknownCommand') return `unknown command '${word}'${near(word, names, path)}`;
  if (error.code === 'commander.help') {
    const [asked] = first === 'help' ? args.slice(1) : [];
    if (asked !== undefined) return `unknown command '${asked}'${near(asked, names, path)}`;
    return `${path} needs a command: ${names.filter((name) => name !== 'help').join(', ')}; ${path} --help tells more`;
  }
  if (error.code === 'commander.excessArguments') {
    return `unexpected argument ${error.message.replace(/^.*: |\.$/gs, '')}`;
  }
  return error.message
    .replace(/^error: /, '')
    .replaceAll(/\s*\n\s*/g, ' ')
    .replace(/\.$/, '');
}

/** The command that the words name, and how it is called. */
function commandOf(program: Command, args: readonly string[]): { readonly command: Command; readonly path: string } {
  let command = program;
  let path = program.name();
  for (const word of args) {
    const next = command.commands.find((each) => each.name() === word);
    if (next === undefined) break;
    command = next;
    path = `${path} ${word}`;
  }
  return { command, path };
}

function near(word: string, known: readonly string[], path: string): string {
  const hint = didYouMean(word, known);
  return hint === '' ? `; ${path} --help lists what there is` : hint;
}
