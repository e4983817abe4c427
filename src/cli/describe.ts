import type { Command } from 'commander';
import { bashCompletion } from './completion/bash.ts';
import { fishCompletion } from './completion/fish.ts';
import { readWords } from './completion/words.ts';
import { zshCompletion } from './completion/zsh.ts';
import type { DescribeForm } from './describe-parse.ts';
import { manPage } from './man.ts';

/** Writes all commands down in a form that another program reads. */
export function describe(program: Command, form: DescribeForm, version: string): string {
  if (form === 'man') return manPage(program, version);
  const write = { bash: bashCompletion, zsh: zshCompletion, fish: fishCompletion }[form];
  return write(readWords(program));
}
