/* Search for a site that is opened as a file: browsers refuse workers there, so that a hidden frame is one.
 * The theme's worker asks for the name IFrameWorker, and awaits importScripts. Online nothing is changed. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.waiting = [];
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      inner.document.open();
      inner.document.write(`<script>
        postMessage = data => parent.dispatchEvent(new CustomEvent("frame-worker", {detail: {self: window, data}}));
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((resolve, reject) => {
          const script = document.createElement("script");
          Object.assign(script, {src: url, onload: resolve, onerror: reject});
          document.head.append(script);
        })), Promise.resolve());
      <\/script><script src="${new URL(url, location)}"><\/script>`);
      inner.document.close();
      inner.addEventListener("load", () => {
        this.waiting.forEach(data => this.deliver(data));
        this.waiting = null;
      });
      window.addEventListener("frame-worker", event => {
        if (event.detail.self === inner) this.dispatchEvent(new MessageEvent("message", {data: event.detail.data}));
      });
    }
    deliver(data) {
      const inner = this.frame.contentWindow;
      inner.dispatchEvent(new inner.MessageEvent("message", {data}));
    }
    postMessage(data) {
      this.waiting ? this.waiting.push(data) : this.deliver(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
