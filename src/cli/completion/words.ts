import type { Argument, Command, Option } from 'commander';

/** What may stand for a value: nothing to complete, a file, or one of these words. */
export type Values = 'none' | 'file' | readonly string[];

/** A flag with its spellings, as they are typed. */
export interface FlagWords {
  readonly names: readonly string[];
  /** Undefined for a switch. */
  readonly values: Values | undefined;
  readonly about: string;
}

/** One command, or the program, whose `path` is empty. */
export interface CommandWords {
  /** The words after `baton` that lead to it. */
  readonly path: readonly string[];
  readonly about: string;
  readonly commands: readonly CommandWords[];
  readonly flags: readonly FlagWords[];
  /** What its arguments may be. */
  readonly values: Values;
}

const FILES = new Set(['file', 'path', 'dir']);
const HELP: FlagWords = { names: ['-h', '--help'], values: undefined, about: 'print this help' };

/** Reads the commands as `--help` knows them; flags that a command's own help leaves out are among them. */
export function readWords(program: Command, path: readonly string[] = []): CommandWords {
  const commands = program.commands.map((command) => readWords(command, [...path, command.name()]));
  const [argument] = program.registeredArguments;
  const help = { ...HELP_COMMAND, values: commands.map((command) => command.path.at(-1) ?? '') };
  return {
    path,
    about: program.summary() || program.description(),
    commands: path.length === 0 ? [...commands, help] : commands,
    flags: [...program.options.map(readFlag), HELP],
    values: argument === undefined ? 'none' : valuesOf(argument, argument.name()),
  };
}

const HELP_COMMAND: CommandWords = {
  path: ['help'],
  about: 'print help for a command',
  commands: [],
  flags: [],
  values: [],
};

/** The program and all commands below it. */
export function allCommands(words: CommandWords): readonly CommandWords[] {
  return [words, ...words.commands.flatMap(allCommands)];
}

function readFlag(option: Option): FlagWords {
  const value = /[<[]([^>\]]*?)(?:\.\.\.)?[>\]]/.exec(option.flags)?.[1];
  return {
    names: [option.short, option.long].filter((name) => name !== undefined),
    values: value === undefined ? undefined : valuesOf(option, value),
    about: option.description,
  };
}

function valuesOf({ argChoices }: Option | Argument, value: string): Values {
  if (argChoices !== undefined) return argChoices;
  return FILES.has(value) ? 'file' : 'none';
}
