"use strict";

// Every address is relative to this page, and so are the calls that it makes: a proxy may put the service under a prefix.
fetch("openapi.json")
  .then((answer) => answer.json())
  .then((spec) => {
    spec.servers = [{ url: new URL(".", document.baseURI).href.replace(/\/$/, "") }];
    SwaggerUIBundle({ spec, dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null });
  })
  .catch((error) => {
    document.getElementById("swagger-ui").textContent = `openapi.json: ${error.message}`;
  });
