import { pino } from 'pino';
import { formatPretty } from './log-pretty.ts';

/** Severity of a line, or `silent` for none at all. */
export type LogLevel = 'trace' | 'debug' | 'info' | 'warn' | 'error' | 'fatal' | 'silent';

/** How lines are written: one JSON object each, or text for people. */
export type LogFormat = 'json' | 'pretty';

/**
 * Fields of a line. Flat values only: a header map, a body or a handle cannot be logged whole by mistake.
 * A caught error goes through {@link errorFields}.
 */
export type LogFields = Readonly<
  Record<string, string | number | bigint | boolean | null | undefined | readonly (string | number)[]>
>;

/** Writes one line of a fixed level. */
export interface LogMethod {
  (message: string): void;
  (fields: LogFields, message: string): void;
}

/** The logging port; ids only, never prompts, generated text, handles or keys. */
export interface Logger {
  readonly trace: LogMethod;
  readonly debug: LogMethod;
  readonly info: LogMethod;
  readonly warn: LogMethod;
  readonly error: LogMethod;
  readonly fatal: LogMethod;
  /** Lines of lower levels are left out from now on. */
  setLevel(level: LogLevel): void;
  /** Whether lines of `level` are written; for fields that are costly to make. */
  isEnabled(level: Exclude<LogLevel, 'silent'>): boolean;
  /** A logger that adds `fields` to each of its lines. */
  child(fields: LogFields): Logger;
}

/** What takes finished lines, each ending in a newline; a Node stream fits. */
export interface LogDestination {
  write(line: string): unknown;
}

/** Settings of {@link createLogger}. */
export interface LogOptions {
  readonly level: LogLevel;
  readonly format: LogFormat;
  /** Default stderr, written synchronously so that the last line before an exit is kept; stdout is the banner's. */
  readonly destination?: LogDestination;
  /** Colours in `pretty` lines. Default false. */
  readonly color?: boolean;
  /** Unix time in milliseconds. Default the system clock. */
  readonly now?: () => number;
}

/** Opens a logger; JSON lines have `level` as a word, `time` as ISO 8601 UTC and `msg`. */
export function createLogger(options: LogOptions): Logger {
  const target = options.destination ?? pino.destination({ fd: 2, sync: true });
  const color = options.color ?? false;
  const now = options.now ?? Date.now;
  const stream: LogDestination =
    options.format === 'json' ? target : { write: (line) => target.write(formatPretty(line, { color })) };
  const root = pino(
    {
      level: options.level,
      base: null,
      timestamp: () => `,"time":"${new Date(now()).toISOString()}"`,
      formatters: { level: (label) => ({ level: label }) },
      // pino's own serializers write every enumerable member of an error or request, headers among them.
      serializers: {},
    },
    { write: (line: string) => void stream.write(line) },
  );
  return bindLogger(root);
}

/** A logger that writes nothing. */
export const SILENT_LOGGER: Logger = {
  trace: ignore,
  debug: ignore,
  info: ignore,
  warn: ignore,
  error: ignore,
  fatal: ignore,
  setLevel: ignore,
  isEnabled: () => false,
  child: () => SILENT_LOGGER,
};

/** Type, message, code and stack of a caught value, its causes' messages appended; no other member of it is logged. */
export function errorFields(error: unknown): LogFields {
  if (!(error instanceof Error)) return { error_type: typeof error };
  const causes: string[] = [];
  for (let at: unknown = error.cause; at instanceof Error && causes.length < 4; at = at.cause) {
    causes.push(`${at.name}: ${at.message}`);
  }
  const code = 'code' in error && typeof error.code === 'string' ? error.code : undefined;
  return {
    error_type: error.name,
    error_message: error.message,
    ...(code === undefined ? {} : { error_code: code }),
    ...(causes.length === 0 ? {} : { error_causes: causes }),
    error_stack: error.stack,
  };
}

function ignore(): void {}

function bindLogger(log: pino.Logger): Logger {
  const method =
    (level: Exclude<LogLevel, 'silent'>): LogMethod =>
    (first: LogFields | string, message?: string) => {
      if (typeof first === 'string') log[level](first);
      else log[level](plainFields(first), message ?? '');
    };
  return {
    trace: method('trace'),
    debug: method('debug'),
    info: method('info'),
    warn: method('warn'),
    error: method('error'),
    fatal: method('fatal'),
    setLevel: (level) => {
      log.level = level;
    },
    isEnabled: (level) => log.isLevelEnabled(level),
    child: (fields) => bindLogger(log.child(plainFields(fields))),
  };
}

/** BigInt has no JSON form; written as a decimal string. Of the others, pino leaves out what is undefined. */
function plainFields(fields: LogFields): LogFields {
  let isPlain = true;
  for (const key in fields) if (typeof fields[key] === 'bigint') isPlain = false;
  if (isPlain) return fields;
  const entries = Object.entries(fields).map(([key, value]) => [
    key,
    typeof value === 'bigint' ? String(value) : value,
  ]);
  return Object.fromEntries(entries);
}
