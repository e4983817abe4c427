import type { Command } from 'commander';
import { type BenchFlagValues, SERVE_FLAGS } from '../bench/flags.ts';
import { addTable, readTable } from './flag-table.ts';

/** What `baton bench` is to do. */
export interface BenchRequest {
  readonly action: 'serve';
  readonly flags: BenchFlagValues;
}

const SERVE_HELP = `
One request after the other to an endpoint on this machine, twenty of them:
  baton bench serve --port 8000 --num-prompts 20 --max-concurrency 1
Ctrl-C ends it and prints what was measured until then. docs/benchmark.md tells what each figure means.
`;

/** Adds `baton bench` and its commands. */
export function addBenchCommand(program: Command, run: (request: BenchRequest) => void): void {
  const bench = program
    .command('bench')
    .summary('measure an OpenAI endpoint')
    .description("Measures any OpenAI-compatible endpoint, with the flags and the reports of vLLM's benchmarks.");
  const serve = bench
    .command('serve')
    .summary('send requests, and print the report of vllm bench serve')
    .description('Sends streamed requests and prints the report of vllm bench serve, row for row.')
    .addHelpText('after', SERVE_HELP);
  addTable(serve, SERVE_FLAGS);
  serve.action((values: Readonly<Record<string, unknown>>) =>
    run({ action: 'serve', flags: readTable(SERVE_FLAGS, values) }),
  );
}
