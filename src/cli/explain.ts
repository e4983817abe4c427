import { readFileSync } from 'node:fs';
import { toJsonString } from '@bufbuild/protobuf';
import {
  type ExplainRouteResponse,
  ExplainRouteResponseSchema,
  type Plan,
  ReuseOutcome,
  type Target,
} from '../../gen/baton/v1/router_pb.ts';
import type { Config } from '../config/config.ts';
import { whyUnread } from '../config/unread.ts';
import { roleWord } from '../core/instance-words.ts';
import type { Logger } from '../obs/log.ts';
import { explainRequest } from '../roles/explain.ts';
import { modeName, outcomeName } from '../services/plan-message.ts';
import { FAILED, OK, USAGE } from './exit-codes.ts';

/** What `baton explain` is asked for. */
export interface ExplainCommand {
  /** `-`: standard input. */
  readonly file: string;
  readonly tenant: string;
  readonly conversation: string;
  readonly json: boolean;
}

/** Where it writes. */
export interface ExplainHost {
  out(text: string): void;
  err(text: string): void;
}

/** Runs `baton explain` to its end; resolves with the exit code: 1 where there is no plan, 2 for a bad request. */
export async function explain(
  host: ExplainHost,
  { file, tenant, conversation, json }: ExplainCommand,
  config: Config,
  log: Logger,
): Promise<number> {
  let body: Uint8Array;
  try {
    body = readFileSync(file === '-' ? STANDARD_INPUT : file);
  } catch (error) {
    host.err(`baton: ${file} ${whyUnread(error)}\n`);
    return USAGE;
  }
  const explained = await explainRequest(config, { body, tenant, conversation }, log);
  if (explained.kind === 'ok') {
    host.out(
      json ? `${toJsonString(ExplainRouteResponseSchema, explained.answer, JSON_STYLE)}\n` : table(explained.answer),
    );
    return OK;
  }
  host.err(`baton: ${explained.kind === 'bad' ? `${file} ` : ''}${explained.message}\n`);
  return explained.kind === 'bad' ? USAGE : FAILED;
}

const STANDARD_INPUT = 0;
const JSON_STYLE = { prettySpaces: 2 };

/** The plan in one line, then every instance with what became of it. */
function table({ plan }: ExplainRouteResponse): string {
  if (plan === undefined) return 'no plan\n';
  const { mode, reason, connector } = plan;
  const rows = [['role', 'instance', 'verdict', 'why'], ...rowsOf(plan)];
  const widths = [0, 1, 2].map((column) => Math.max(...rows.map((row) => row[column]?.length ?? 0)));
  const lines = rows.map((row) =>
    row
      .map((text, column) => text.padEnd(widths[column] ?? 0))
      .join('  ')
      .trimEnd(),
  );
  const head = `plan: ${modeName(mode)} (${reason})${connector === '' ? '' : `, connector ${connector}`}`;
  return `${head}\n${reuseOf(plan)}\n${lines.join('\n')}\n`;
}

/** A line about what earlier turns left; empty for a first turn. */
function reuseOf({ prefillHandle, reuseOutcome }: Plan): string {
  if (prefillHandle !== undefined)
    return "reuse: the handle of an earlier turn, if the prompt's tokens are proven equal\n";
  return reuseOutcome === ReuseOutcome.UNSPECIFIED ? '' : `reuse: ${outcomeName(reuseOutcome)}\n`;
}

function rowsOf({ prefill, decode, verdicts }: Plan): readonly (readonly string[])[] {
  const chosen = (role: string, target: Target | undefined): readonly (readonly string[])[] => {
    if (target === undefined) return [];
    const { instanceId, dataParallelRank } = target;
    return [
      [role, instanceId, 'chosen', dataParallelRank === undefined ? '' : `data parallel rank ${dataParallelRank}`],
    ];
  };
  return [
    ...chosen('prefill', prefill),
    ...chosen(prefill === undefined ? 'alone' : 'decode', decode),
    ...verdicts.map(({ role, instanceId, reason, detail }) => [roleWord(role), instanceId, reason, detail]),
  ];
}
