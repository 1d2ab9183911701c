;;;; What pelton exports. The conditions are generated, and exported, by library.lisp.

(defpackage #:pelton
  (:use #:cl #:sb-alien)
  (:import-from #:sb-sys
                #:system-area-pointer #:sap-int #:int-sap #:sap+ #:sap-ref-8 #:sap-ref-32 #:sap-ref-64 #:signed-sap-ref-64
                #:sap-ref-sap #:vector-sap #:with-pinned-objects #:without-interrupts #:with-local-interrupts)
  (:export
   ;; bytes
   #:octets #:make-octets #:sap-octets
   ;; conditions, beside one for each code of the library
   #:pelton-error #:pelton-error-code #:pelton-error-detail #:channel-ended #:mistake #:sink-error-cause
   #:forgotten #:wait-longer #:drop-message #:resume-channel #:try-again #:skip-damage
   ;; any handle
   #:handle #:handle-open-p #:close-handle #:resume #:sync #:drain #:descriptor #:info
   ;; channels
   #:sender #:receiver #:senders #:make-channel #:open-sender #:open-receiver #:open-senders
   #:with-channel #:with-sender #:with-receiver #:with-senders
   #:send #:try-send #:send-sap #:trim
   #:with-reserved
   #:receive #:try-receive #:receive-into #:with-received #:do-messages #:do-received
   ;; appending and flushing
   #:appenders #:open-appenders #:with-appenders #:append-message #:append-sap #:flush
   #:record-file #:runs #:do-runs #:do-records #:map-record-file
   #:flushing #:open-flush #:with-flush #:run-flush
   ;; calls
   #:client #:open-client #:with-client #:call #:with-call #:submit #:await #:cancel #:notify
   #:call-failed #:call-failed-code #:call-failed-octets #:call-abandoned
   #:service #:open-service #:with-service #:serve #:stop
   #:request #:request-octets #:request-pid #:request-uid #:request-cancelled-p #:reply #:reply-part #:fail))
