/** An HTTP error of the engine, with the members of its `error` object. */
export class ApiError extends Error {
  readonly status: number;
  readonly type: string;
  readonly param: string | null;

  constructor(status: number, message: string, type: string, param: string | null) {
    super(message);
    this.name = 'ApiError';
    this.status = status;
    this.type = type;
    this.param = param;
  }

  /** The reply body. */
  get body(): object {
    return { error: { message: this.message, type: this.type, param: this.param, code: this.status } };
  }
}

/** A value the engine refuses by meaning. */
export function badRequest(message: string, param: string | null = null): ApiError {
  return new ApiError(400, message, 'BadRequestError', param);
}

/** A value refused by the schema, printed as Python prints the error list. */
export function schemaError(type: string, loc: string, text: string, input: string, ctx?: string): ApiError {
  const tail = ctx === undefined ? '' : `, 'ctx': {'error': '${ctx}'}`;
  const detail = `{'type': '${type}', 'loc': '${loc}', 'msg': '${text}', 'input': ${input}${tail}}`;
  return new ApiError(400, `1 validation error:\n  ${detail}`, 'Bad Request', loc);
}

/** The engine could not load KV. */
export function internalError(): ApiError {
  return new ApiError(500, 'Internal server error', 'InternalServerError', null);
}

/** The engine core is gone. */
export function deadEngineError(version: string): ApiError {
  const message = version.startsWith('0.32.')
    ? 'EngineCore encountered an issue. See stack trace (above) for the root cause.'
    : 'The server had an error while processing your request.';
  return new ApiError(500, message, 'InternalServerError', null);
}

/** Python's rendering of a JSON value. */
export function toPython(value: unknown): string {
  if (value === null || value === undefined) return 'None';
  if (value === true) return 'True';
  if (value === false) return 'False';
  if (typeof value === 'string') return `'${value.replaceAll('\\', '\\\\').replaceAll("'", "\\'")}'`;
  if (Array.isArray(value)) return `'<list of ${value.length} items>'`;
  if (typeof value === 'object') return `'<dict of ${Object.keys(value).length} items>'`;
  return String(value);
}

/** Python's rendering of a float. */
export function toPythonFloat(value: number): string {
  return Number.isInteger(value) ? `${value}.0` : String(value);
}

/** Text as Python's json module writes it, with a space after each colon and comma. */
export function toPythonJson(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(toPythonJson).join(', ')}]`;
  if (typeof value === 'object' && value !== null) {
    return `{${Object.entries(value)
      .map(([key, item]) => `${JSON.stringify(key)}: ${toPythonJson(item)}`)
      .join(', ')}}`;
  }
  return JSON.stringify(value);
}
