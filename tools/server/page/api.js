// A client of the server's API. Addresses are relative to the page's address.

const KEY = "vkbackend.key"; // deleted with the tab

/** An error from the server. The status is 0 if the server was not reached. */
export class ApiError extends Error {
  constructor(status, { message, code, progress } = {}) {
    super(message || `The server answered ${status}.`);
    this.status = status;
    this.code = code;
    this.progress = progress;
  }
}

export class EventLines {
  constructor() {
    this.rest = "";
  }

  push(text) {
    const lines = (this.rest + text).split(/\r?\n/);
    this.rest = lines.pop();
    return lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
  }
}

export class Api {
  /** `askKey` resolves to a key, or to null if the user cancelled. */
  constructor(askKey) {
    this.askKey = askKey;
    this.asking = null;
  }

  async request(path, options = {}) {
    const sent = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(sent ? { authorization: `Bearer ${sent}` } : {}) };
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, { message: "The server cannot be reached." });
    }
    if (response.ok) return response;
    if (response.status === 401 && (await this.newKey(sent))) return this.request(path, options);
    throw new ApiError(response.status, (await response.json().catch(() => null))?.error);
  }

  /** Return whether to retry with another key than `sent`. Concurrent requests ask the user only once. */
  async newKey(sent) {
    if (sessionStorage.getItem(KEY) !== sent) return true;
    this.asking ??= this.askKey(sent !== null).finally(() => (this.asking = null));
    const key = await this.asking;
    if (key) sessionStorage.setItem(KEY, key);
    return Boolean(key);
  }

  async json(path) {
    return (await this.request(path)).json();
  }

  /** Yields OpenAI's chunks. */
  async *chat(body, signal) {
    const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal };
    const response = await this.request("v1/chat/completions", options);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const lines = new EventLines();
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        for (const data of lines.push(value)) {
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new ApiError(500, chunk.error);
          yield chunk;
        }
      }
    } catch (error) {
      if (error instanceof TypeError) throw new ApiError(0, { message: "Connection lost." });
      throw error;
    } finally {
      reader.cancel().catch(() => {});
    }
    throw new ApiError(0, { message: "The answer ended early." });
  }
}
